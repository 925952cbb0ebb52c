"""The corpus from packages, with a folder of wheels in place of pip's registry and a script in place of apt-get."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from forge.runtime.errors import BAD_CONFIG, FAILED, FINISHED, UserError
from forge.tools.prepare import packages
from forge.tools.prepare.packages import Manifest, fetch, make_corpus, read_manifest
from scripts.make_corpus import MANIFEST
from tests.support.archives import deb, wheel
from tests.support.prepared import text_of
from tests.support.trained import ROOT, Result, call

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb"),
]
_APT = """#!/bin/sh
for last; do :; done
cp "{folder}/${{last%%=*}}_1.0_all.deb" . 2>/dev/null && exit
echo "E: none" >&2
exit 100
"""


def text(number: int) -> bytes:
    """Return words of letters alone, in which a tokenizer finds pieces."""
    return text_of(number).translate(str.maketrans("0123456789", "abcdefghij")).encode()


def texts(first: int, count: int, ending: str) -> dict[str, bytes]:
    return {f"p/{number}{ending}": text(number) for number in range(first, first + count)}


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Return a folder with packages as pip and apt-get serve them. File 0 of alpha is also in beta, in other folders."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, "alpha", texts(0, 60, ".py"))
    wheel(folder, "beta", {**texts(100, 60, ".py"), "q/copy.py": text(0)})
    deb(folder, "gamma", {f"./usr/{name}": content for name, content in texts(200, 60, ".md").items()})
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "apt-get").write_text(_APT.format(folder=folder))
    (commands / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return folder


def manifest(index: Path, wanted: str = "", **others) -> Manifest:
    packages = [
        {
            "name": path.name.replace("_", "-").split("-")[0],
            "version": "1.0",
            "registry": "pypi" if path.suffix == ".whl" else "debian",
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "licence": "MIT",
            "sources": ["python"] if path.suffix == ".whl" else ["prose"],
            "small": 0.5,
        }
        for path in sorted(index.iterdir())
    ]
    size = {"vocab_size": 400, "sha256": wanted}
    return Manifest(
        holdout=0.2,
        sizes={"whole": size, "small": size},
        sources={"python": [".py"], "prose": [".md"]},
        packages=[*packages, *others.get("more", [])],
    )


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the indices of datasets, whose origin names folders."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "dataset.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_two_builds_from_scratch_are_equal_byte_for_byte(index, tmp_path, monkeypatch, capsys) -> None:
    asked = manifest(index)
    first = make_corpus(asked, "whole", tmp_path / "cache1", tmp_path / "a", workers=1)
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    turned = asked.model_copy(update={"packages": asked.packages[::-1]})
    second = make_corpus(turned, "whole", tmp_path / "cache2", tmp_path / "elsewhere" / "b", workers=2)
    assert first == second
    found = contents(tmp_path / "a")
    assert found == contents(tmp_path / "elsewhere" / "b") and "python/validation/tokens-00000.bin" in found
    assert first in capsys.readouterr().out


def test_a_document_of_two_packages_is_kept_once_and_splits_share_none(index, tmp_path) -> None:
    make_corpus(manifest(index), "whole", tmp_path / "cache", tmp_path / "out", workers=1)
    lines = []
    for split in ("train", "validation"):
        kept = (tmp_path / "out/python" / split / "metadata.jsonl").read_text().splitlines()
        assert kept
        lines += [json.loads(line)["path"] for line in kept]
    assert len(lines) == 120 and ("p/0.py" in lines) != ("q/copy.py" in lines)


def test_the_small_corpus_is_a_part_of_the_whole(index, tmp_path) -> None:
    whole, small = (
        {line for path in (tmp_path / size).rglob("text/*/*.jsonl") for line in path.read_text().splitlines()}
        for size in ("whole", "small")
        if make_corpus(manifest(index), size, tmp_path / "cache", tmp_path / size, workers=1)
    )
    assert small < whole and 0.3 < len(small) / len(whole) < 0.7


def test_the_same_command_again_fetches_nothing_and_deletes_nothing(index, tmp_path, monkeypatch) -> None:
    cache, output = tmp_path / "cache", tmp_path / "out"
    for folder in (cache, output):
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    asked = manifest(index)
    first = make_corpus(asked, "whole", cache, output, workers=1)
    before = contents(output)
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache / "nowhere"))
    assert make_corpus(asked, "whole", cache, output, workers=1) == first
    assert contents(output) == before and (cache / "mine.txt").read_text() == "mine"


def test_text_left_by_a_killed_build_is_removed(index, tmp_path, monkeypatch) -> None:
    def build() -> None:
        make_corpus(manifest(index), "small", tmp_path / "cache", tmp_path / "out", workers=1)

    child = os.fork()
    if not child:
        monkeypatch.setattr(
            packages, "_refuse_other_datasets", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
        try:
            build()
        finally:
            os._exit(1)  # the child must not continue the tests
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert any(path.is_file() for path in (tmp_path / "out" / "text").rglob("*"))
    build()
    assert sorted(path.name for path in (tmp_path / "out" / "text").iterdir()) == ["prose", "python"]


def test_a_folder_that_forge_did_not_mark_is_refused_and_kept(index, tmp_path) -> None:
    mine = tmp_path / "out" / "text" / ".forge-new" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"--output: .*\.forge-new"):
        make_corpus(manifest(index), "small", tmp_path / "cache", tmp_path / "out", workers=1)
    assert mine.read_text() == "mine"


def test_another_size_in_the_same_folder_is_refused_and_changes_nothing(index, tmp_path) -> None:
    make_corpus(manifest(index), "small", tmp_path / "cache", tmp_path / "out", workers=1)
    before = contents(tmp_path / "out")
    with pytest.raises(
        UserError, match=r"was not made from the text of --size whole .*choose another --output"
    ):
        make_corpus(manifest(index), "whole", tmp_path / "cache", tmp_path / "out", workers=1)
    assert contents(tmp_path / "out") == before
    shutil.rmtree(tmp_path / "out" / "text")
    make_corpus(manifest(index), "small", tmp_path / "cache", tmp_path / "out", workers=1)
    assert contents(tmp_path / "out") == before


def test_a_tampered_package_is_named_and_not_used(index, tmp_path) -> None:
    asked = manifest(index)
    wheel(index, "beta", texts(300, 3, ".py"))
    with pytest.raises(
        UserError, match=r"beta 1\.0: pypi serves a file with SHA-256 .* the file is not used"
    ) as error:
        make_corpus(asked, "whole", tmp_path / "cache", tmp_path / "out", workers=1)
    assert error.value.exit_code == FAILED and not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [asked.packages[0].file]


def test_all_missing_packages_are_named(index, tmp_path) -> None:
    asked = manifest(index)
    (index / "beta-1.0-py3-none-any.whl").unlink()
    (index / "gamma_1.0_all.deb").unlink()
    with pytest.raises(UserError, match=r"missing: beta 1\.0 from pypi .*gamma 1\.0 from debian") as error:
        fetch(list(asked.packages), tmp_path / "cache")
    assert error.value.exit_code == FAILED


def test_a_damaged_file_of_the_cache_is_fetched_again(index, tmp_path) -> None:
    asked = manifest(index).packages[0]
    path = fetch([asked], tmp_path)[asked]
    path.write_bytes(b"damaged")
    fetch([asked], tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == asked.sha256


def test_a_source_distribution_is_not_built(index, tmp_path) -> None:
    """pip would run its setup.py."""
    import tarfile

    (tmp_path / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with tarfile.open(index / "delta-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "setup.py", "delta-1.0/setup.py")
    source = manifest(index).packages[0].model_copy(update={"name": "delta"})
    with pytest.raises(UserError, match=r"missing: delta 1\.0 from pypi"):
        fetch([source], tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


def write(path: Path, asked: Manifest) -> Path:
    """The manifest as a file."""
    data = asked.model_dump()
    lines = [f"holdout = {data['holdout']}"]
    lines += [
        f"[sizes.{size}]\nvocab_size = 400\nsha256 = {json.dumps(one['sha256'])}"
        for size, one in data["sizes"].items()
    ]
    lines += [
        "[sources]",
        *(f"{source} = {json.dumps(list(found))}" for source, found in data["sources"].items()),
    ]
    for package in data["packages"]:
        lines += ["[[packages]]", *(f"{key} = {json.dumps(value)}" for key, value in package.items())]
    path.write_text("\n".join(lines))
    return path


def test_the_script_ends_with_0_only_if_the_hash_is_the_manifests(index, tmp_path) -> None:
    def build(name: str, *options: str, wanted: str = "") -> Result:
        path = write(tmp_path / name, manifest(index, wanted))
        places = ("--manifest", path, "--output", "out", "--cache", "cache", "--workers", "1")
        served = {name: os.environ[name] for name in ("PATH", "PIP_NO_INDEX", "PIP_FIND_LINKS")}
        return call(tmp_path, "make_corpus", *places, *options, environment=served)

    first = build("none.toml")
    assert first.code == FINISHED and "the manifest has no hash" in first.out, first.err
    found = re.search(r"^([0-9a-f]{64})  out", first.out, re.M)[1]
    same = build("same.toml", wanted=found)
    assert same.code == FINISHED and "as in the manifest" in same.out
    other = build("other.toml", wanted="0" * 64)
    assert other.code == FAILED and found in other.err and "0" * 64 in other.err
    size = build("none.toml", "--size", "tiny")
    assert size.code == BAD_CONFIG and "must be one of whole, small" in size.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["python"]', '["snake"]', "'snake' is not one of python, prose"),
        ('"pypi"', '"conda"', "packages.0.registry"),
        ('"alpha"', '"../alpha"', "packages.0.name"),
        ('"alpha"', '"--index"', "packages.0.name"),
        ("holdout", "holdut", "holdout"),
        ("[sources]", "[sources", "not TOML"),
    ],
)
def test_a_wrong_manifest_is_one_sentence(index, tmp_path, old: str, new: str, message: str) -> None:
    path = write(tmp_path / "corpus.toml", manifest(index))
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=re.escape(message)):
        read_manifest(path)


def test_the_page_lists_the_packages_and_the_hash() -> None:
    page = (ROOT / "docs" / "guides" / "corpus.md").read_text()
    shipped = read_manifest(MANIFEST)
    rows = {
        tuple(cell.strip() for cell in row.split("|")[1:5])
        for row in page.splitlines()
        if row.startswith("| ")
    }
    for one in shipped.packages:
        assert (one.name, one.version, one.registry, one.licence) in rows, one.label
    assert shipped.sizes["small"].sha256 and shipped.sizes["small"].sha256 in page
