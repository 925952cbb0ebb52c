"""Imported once by the fork server, so that no rank pays for it: every module of forge whose packages are installed."""

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

# What is imported lives as long as the server: a rank's collector passes it by, and so does not copy its pages either.
gc.collect()
gc.freeze()
