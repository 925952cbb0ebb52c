"""The fork server imports forge where optional packages are missing."""

import subprocess
import sys

from tests.support.trained import ROOT

WITHOUT = (
    "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'safetensors', 'transformers', 'fsspec']))"
)


def test_packages_of_extras_are_not_needed() -> None:
    code = f"{WITHOUT}; import forge.verify.preload; assert 'forge.train.launch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
