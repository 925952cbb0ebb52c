"""One step of a parallel model: forward and backward, gradients, routers."""
