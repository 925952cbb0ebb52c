"""The fork server imports forge without optional packages."""

import subprocess
import sys

from tests.support.trained import ROOT

WITHOUT = (
    "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'safetensors', 'transformers', 'fsspec']))"
)


def test_packages_of_extras_are_not_needed() -> None:
    code = f"{WITHOUT}; import forge.tools.verify.preload; assert 'forge.run.launch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
