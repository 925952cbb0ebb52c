"""Tools around training. Training code names them only through `forge.runtime.tools`."""
