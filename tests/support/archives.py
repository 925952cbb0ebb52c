"""Build wheels and Debian packages with arbitrary member names, to test the reading of archives."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path


def wheel(folder: Path, name: str, files: Mapping[str, bytes], version: str = "1.0") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    own = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {**files, **own}.items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return path


def deb(folder: Path, name: str, files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> Path:
    """Write a package, which is an ar archive of three members. links: symbolic link -> target."""
    path = folder / f"{name}_1.0_all.deb"
    control = (
        f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: tests\nDescription: test\n".encode()
    )
    members = {
        "debian-binary": b"2.0\n",
        "control.tar": _tar({"./control": control}, {}),
        "data.tar": _tar(files, links or {}),
    }
    content = b"!<arch>\n"
    for member, data in members.items():
        head = f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n"
        content += head.encode() + data + b"\n" * (len(data) % 2)
    path.write_bytes(content)
    return path


def _tar(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return out.getvalue()
