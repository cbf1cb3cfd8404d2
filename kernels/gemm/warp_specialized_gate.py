"""Computes ``gated_activation.gate_times`` cheaply at a tile's end, where both multiplying groups arrive together and
the tensor cores wait.

It takes half of the instructions of exact division and exponentials, and three quarters of their instructions for the
special function units, which are few.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..rowwise.silu_and_mul import silu_times


@gluon.jit
def _sigmoid(x):
    """Sigmoids of two values at once: ``1 / a`` and ``1 / b`` by one reciprocal of ``a * b``. Below -42 the result is
    2^-62 at least, so that the product of two is finite; others are right to some 2^-22."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 a, b, p;
        mul.f32 a, $2, 0fBFB8AA3B;
        mul.f32 b, $3, 0fBFB8AA3B;
        min.f32 a, a, 0f42780000;
        min.f32 b, b, 0f42780000;
        ex2.approx.ftz.f32 a, a;
        ex2.approx.ftz.f32 b, b;
        add.f32 a, a, 0f3F800000;
        add.f32 b, b, 0f3F800000;
        mul.f32 p, a, b;
        rcp.approx.ftz.f32 p, p;
        mul.f32 $0, p, b;
        mul.f32 $1, p, a;
        }
        """, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def gate_times(gate, up, LIMIT: gl.constexpr):
    if LIMIT > 0.0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
        made = gate * _sigmoid(1.702 * gate) * (up + 1.0)
    else:
        made = gate * _sigmoid(gate) * up
    return made


@gluon.jit
def rounded(x, TYPE: gl.constexpr):
    """Rounds to 16 bits and back, two values at once: one at a time the conversion is as slow as a reciprocal."""
    if TYPE is gl.bfloat16:
        made = gl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, u;
            cvt.rn.bf16x2.f32 t, $3, $2;
            shl.b32 u, t, 16;
            and.b32 t, t, 0xffff0000;
            mov.b32 $0, u;
            mov.b32 $1, t;
            }
            """, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        made = x.to(TYPE).to(gl.float32)
    return made


@gluon.jit
def gate_times_exactly(gate, up, TYPE: gl.constexpr):
    """``silu_and_mul`` of gates and ups in 16 bits, bit by bit as its own kernel computes it."""
    return silu_times(rounded(gate, TYPE), rounded(up, TYPE))
