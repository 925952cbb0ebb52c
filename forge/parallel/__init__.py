"""One model over many ranks: meshes, the fixed order in which a layout is applied, and what a step does on it."""
