"""One model over many ranks: meshes, the fixed order of the steps that apply a layout, and the parallel part of a
step."""
