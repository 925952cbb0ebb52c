"""One model over many ranks: meshes, the steps that apply a layout in fixed order, and a step's parallel part."""
