"""moe_patch/tools/wgmma_operands.py on small kernels: the hazards it must find, and no others."""

from __future__ import annotations

from moe_patch.tools.wgmma_operands import overwritten_operands

FROM_REGISTERS = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, "
    "{%r5,%r6,%r7,%r8}, %rd1, 1, 1, 1, 0;"
)
FROM_MEMORY = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %rd2, %rd1, 1, 1, 1;"
)
WRITE = "mov.b32 %r5, 0;"


def kernel(*lines: str) -> str:
    return "\n".join([".visible .entry k(", ".param .u64 p)", "{", *lines, "ret;", "}"])


def wait(left: int) -> str:
    return f"wgmma.wait_group.sync.aligned {left};"


def test_a_write_before_the_wait_is_found() -> None:
    (found,) = overwritten_operands(kernel(FROM_REGISTERS, WRITE, wait(0)))
    assert found == "line 5: mov.b32 %r5, 0; writes %r5"
    for write in (
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r8, %r21, %r22}, [%r30];",
        "@%p1 ld.shared.b32 %r6, [%r30];",
        "{ .reg .pred c; mov.b32 %r7, 1; }",
    ):
        assert len(overwritten_operands(kernel(FROM_REGISTERS, write))) == 1


def test_what_leaves_the_registers_alone_is_not() -> None:
    for lines in (
        (FROM_REGISTERS, wait(0), WRITE),
        (FROM_MEMORY, WRITE),
        (FROM_REGISTERS, FROM_MEMORY, wait(1), WRITE),
        (FROM_REGISTERS, "st.shared.b32 [%r5], %r9;", "add.s32 %r9, %r5, %r6;", wait(0)),
        (FROM_REGISTERS, "// mov.b32 %r5, 0;", "setp.lt.s32 %p1, %r5, %r6;"),
    ):
        assert overwritten_operands(kernel(*lines)) == []
    assert len(overwritten_operands(kernel(FROM_REGISTERS, FROM_MEMORY, wait(2), WRITE))) == 1


def test_the_next_turn_of_a_loop_and_branches() -> None:
    def loop(left: int) -> str:
        return kernel(
            "$L__BB0_1:", WRITE, FROM_REGISTERS, wait(left), "@%p1 bra $L__BB0_1;", wait(0)
        )

    assert len(overwritten_operands(loop(1))) == 1
    assert overwritten_operands(loop(0)) == []

    def branch(waited: str) -> str:
        return kernel(
            FROM_REGISTERS, "@%p1 bra $L__BB0_2;", waited, "bra.uni $L__BB0_3;", "$L__BB0_2:",
            wait(0), "$L__BB0_3:", WRITE,
        )  # fmt: skip

    assert overwritten_operands(branch(wait(0))) == []
    assert len(overwritten_operands(branch("bar.sync 0;"))) == 1


def test_a_table_of_branches() -> None:
    def table(waited: str) -> str:
        return kernel(
            FROM_REGISTERS, "$L_brx_0: .branchtargets", "$L__BB0_1,", "$L__BB0_2;",
            "brx.idx %r40, $L_brx_0;", "$L__BB0_1:", waited, WRITE, "bra.uni $L__BB0_3;",
            "$L__BB0_2:", wait(0), "$L__BB0_3:", "mov.b32 %r50, 0;",
        )  # fmt: skip

    assert overwritten_operands(table(wait(0))) == []
    assert len(overwritten_operands(table("bar.sync 0;"))) == 1
