"""The GPU's kernels for the products of the block formats. Not yet run on a real GPU: tests check only the arguments.

Every product is computed as a b^T. Both matrices are padded with zeros to whole blocks and quantised along their rows:

    output          a = x [tokens, in]      b = W [out, in]
    input gradient  a = dy [tokens, out]    b = W^T [in, out]
    weight gradient a = dy^T [out, tokens]  b = x^T [in, tokens], each sequence padded to whole blocks

`Format.quantise` makes the codes and scales, as in emulation, so a GPU changes only the order of float32 sums.

    blockwise  Hopper: cuBLASLt (torch.nn.functional.scaled_mm). Blackwell has no such kernel and uses torchao's Triton
               kernels. Experts are emulated: PyTorch has no grouped kernel, and torchao's needs DeepGEMM
    mxfp8      Blackwell: torch._scaled_mm, and torch._scaled_grouped_mm for experts, with torchao's Triton kernels,
               which put scales in the tensor cores' order
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.model.experts import RowGroups
from forge.parallel.float8.formats import Format, Quantised
from forge.parallel.float8.gathering import GatheredWeight
from forge.parallel.float8.products import Emulated
from forge.parallel.float8.torchao import quiet


class LinearKernels:
    """The products of a linear layer, each by one `_multiply`."""

    form: Format

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        y = self._multiply(_rows(x), _weight(weight, self.form, -1), square=True)
        return y[:, : weight.shape[0]].unflatten(0, x.shape[:-1])

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        y = self._multiply(_rows(grad), _weight(weight, self.form, -2), square=True)
        return y[:, : weight.shape[1]].unflatten(0, grad.shape[:-1])

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        of_x = _quantised(_tokens(x, self.form), self.form)
        return self._multiply(_tokens(grad, self.form), of_x, square=False)[:, : x.shape[-1]]

    def _multiply(self, a: Tensor, of_b: Quantised, *, square: bool) -> Tensor:
        """Return a @ b.mT, bfloat16 `[m, n]`.

        a `[m, k]`. of_b: codes and scales of b `[n, k]`, in whole blocks. square: b is a weight, which the blockwise format
        scales in 128 x 128 blocks.
        """
        raise NotImplementedError


class BlockwiseKernels(LinearKernels, Emulated):
    """`Products` of blockwise: GPU kernels for linear layers, emulation for experts.

    native: True: use cuBLASLt's kernel (Hopper). False: use torchao's.
    """

    def __init__(self, form: Format, *, native: bool):
        super().__init__(form)
        self.native = native
        if not native:
            with quiet():
                from torchao.prototype.blockwise_fp8_training import kernels

            self._with_square = kernels.triton_fp8_gemm_1x128_128x128
            self._with_rows = kernels.triton_fp8_gemm_1x128_128x1

    def _multiply(self, a: Tensor, of_b: Quantised, *, square: bool) -> Tensor:
        rows = a.shape[0]
        codes, scales = _quantised(a, self.form)
        if not self.native:
            kernel = self._with_square if square else self._with_rows
            # The kernels take square scales `[k / 128, n / 128]` column-major and row scales `[k / 128, n]` row-major.
            theirs = of_b.scales.contiguous().mT if square else of_b.scales.mT.contiguous()
            y = kernel(codes, of_b.codes.mT, _by_columns(scales), theirs, out_dtype=torch.bfloat16)
            return y[:rows]
        of_rows, of_squares = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        y = F.scaled_mm(
            codes,
            of_b.codes.mT,
            scale_a=_by_columns(scales),
            scale_recipe_a=of_rows,
            # cuBLASLt needs square scales contiguous along k, padded to a multiple of 4.
            scale_b=_in_fours(of_b.scales).mT if square else _by_columns(of_b.scales),
            scale_recipe_b=of_squares if square else of_rows,
            output_dtype=torch.bfloat16,
        )
        return y[:rows]


class MXKernels(LinearKernels):
    """`Products` of mxfp8, by GPU kernels."""

    def __init__(self, form: Format):
        self.form = form
        with quiet():
            from torchao.prototype.moe_training.kernels.mxfp8 import quant
            from torchao.prototype.mx_formats.utils import to_blocked

        self._to_blocked = to_blocked
        self._groups_to_blocked: Any = quant.triton_mx_block_rearrange_2d_M_groups
        self._experts_to_blocked: Any = quant.triton_mx_block_rearrange_per_group_3d

    def grouped_output(self, rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        y = self._multiply_groups(rows, _weight(weight, self.form, -1), groups)
        return y[:, : weight.shape[-2]]

    def grouped_grad_input(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        y = self._multiply_groups(grad, _weight(weight, self.form, -2), groups)
        return y[:, : weight.shape[-1]]

    def _multiply(self, a: Tensor, of_b: Quantised, *, square: bool) -> Tensor:
        of_a = _quantised(a, self.form)
        y = torch._scaled_mm(
            of_a.codes,
            of_b.codes.mT,
            self._to_blocked(of_a.scales),
            self._to_blocked(of_b.scales),
            out_dtype=torch.bfloat16,
        )
        return y[: a.shape[0]]

    def _multiply_groups(self, rows: Tensor, of_weight: Quantised, groups: RowGroups) -> Tensor:
        """rows `[n, k]` in `groups`, weight `[groups, out, k]` in whole blocks -> bfloat16 `[n, out]`."""
        if rows.shape[0] == 0:
            return rows.new_zeros(0, of_weight.codes.shape[1])
        of_rows = self.form.quantise(_padded(rows, self.form.block, 1), self.form.along(-1))
        return torch._scaled_grouped_mm(
            of_rows.codes,
            of_weight.codes.mT,
            self._groups_to_blocked(of_rows.scales, groups.ends),
            self._experts_to_blocked(of_weight.scales),
            offs=groups.ends,
            out_dtype=torch.bfloat16,
        )


def _weight(weight: Tensor, form: Format, dim: int) -> Quantised:
    """Return weight `[..., out, in]`, padded to whole blocks and quantised along `dim`.

    With dim = -2 the result is transposed, so `dim` is last. Codes gathered by FSDP2 are used unchanged.
    """
    if not isinstance(weight, GatheredWeight):
        turned = _whole_blocks(weight if dim == -1 else weight.mT, form)
        return form.quantise(turned, form.of_weight(-1))
    codes, scales = weight.quantised(dim)
    return Quantised(codes, scales) if dim == -1 else Quantised(codes.mT.contiguous(), scales.mT.contiguous())


def _quantised(x: Tensor, form: Format) -> Quantised:
    """Return x `[m, k]`, padded to whole blocks and quantised along k."""
    return form.quantise(_whole_blocks(x, form), form.along(-1))


def _rows(x: Tensor) -> Tensor:
    """x `[..., k]` -> `[m, k]`."""
    return x.reshape(-1, x.shape[-1])


def _tokens(x: Tensor, form: Format) -> Tensor:
    """x `[..., tokens, features]` -> `[features, all tokens]`, each sequence padded to whole blocks."""
    return _padded(x, 1, form.block).flatten(0, -2).mT


def _whole_blocks(x: Tensor, form: Format) -> Tensor:
    """Pad the last two dimensions of x `[..., m, k]` with zeros, at their ends, to whole blocks, as every kernel needs."""
    return _padded(x, form.block, form.block)


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    """Pad x `[..., m, k]` with zeros until k is a multiple of `columns` and m a multiple of `rows`.

    The result is contiguous.
    """
    pad = (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows)
    return F.pad(x, pad) if any(pad) else x.contiguous()


def _by_columns(scales: Tensor) -> Tensor:
    return scales.mT.contiguous().mT


def _in_fours(scales: Tensor) -> Tensor:
    """Pad scales `[n / 128, k / 128]` with ones to a multiple of 4 columns."""
    return F.pad(scales, (0, -scales.shape[-1] % 4), value=1.0)
