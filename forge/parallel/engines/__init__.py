"""Data parallelism: FSDP2, or contiguous buffers (ddp, zero1, zero2), behind the interface `DataParallel`."""
