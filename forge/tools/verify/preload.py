"""Import every module of forge whose dependencies are installed. The fork server imports this file before it forks ranks."""

import contextlib
import gc
import importlib
import pkgutil

import forge
from forge.runtime.errors import MissingExtra

for _module in pkgutil.walk_packages(forge.__path__, "forge."):
    if _module.name.endswith("__main__"):  # importing this would run a command
        continue
    with contextlib.suppress(ImportError, MissingExtra):
        importlib.import_module(_module.name)

# Imported objects live as long as the server. After a freeze, the garbage collector of a rank does not touch them, so their
# memory pages stay shared.
gc.collect()
gc.freeze()
