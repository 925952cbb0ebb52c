"""Tools around training. Training code refers to them only through `forge.runtime.tools`."""
