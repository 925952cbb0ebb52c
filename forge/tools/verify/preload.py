"""Imports for the fork server: every module of forge whose dependencies are installed. Ranks are forked with them loaded."""

import contextlib
import gc
import importlib
import pkgutil

import forge
from forge.runtime.errors import MissingExtra

for _module in pkgutil.walk_packages(forge.__path__, "forge."):
    if _module.name.endswith("__main__"):  # is a command, not to be executed
        continue
    with contextlib.suppress(ImportError, MissingExtra):
        importlib.import_module(_module.name)

# Imported objects live as long as the server. A rank's collector skips frozen ones, and so copies no pages.
gc.collect()
gc.freeze()
