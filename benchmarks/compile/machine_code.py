"""How many instructions the loops of a compiled kernel have, and in which order it waits: read without a GPU."""

import re
import subprocess
import tempfile

from triton import knobs

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")
# Of PTX, and of machine code.
_WAIT = re.compile(r"griddepcontrol\.wait|\bACQBULK\b")
_ACCESS = re.compile(r"\b(?:(?:ld|st|atom|red)\.[\w.:]*global|cp\.async|(?:LDG|STG|LD\.E|ST\.E|ATOM|RED|UBLK|UTMA)\w*)")
_JUMP = re.compile(r"\bbra[\w.]*\s+(\$\w+)|\bBRA\b.*?(\.L_x_\d+)")
_END = re.compile(r"\b(?:ret|EXIT)\b")


def disassembled(cubin: bytes) -> str:
    """The machine code of a kernel as Triton keeps it (``asm["cubin"]``), by the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # nosec B603 # no shell


def too_early(code: str) -> list[str] | None:
    """The forbidden work of a kernel before it waits for the one before it (see ``dependent_launch``).

    ``code``: its PTX or the result of ``disassembled``. Accesses to global memory are listed, ends, and jumps over the
    wait; prefetching is none of them. None: it does not wait.
    """
    wait = _WAIT.search(code)
    if wait is None:
        return None
    before = code[: wait.start()]
    jumps = {label for found in _JUMP.findall(before) for label in found if label}
    return [*_ACCESS.findall(before), *_END.findall(before), *(to for to in jumps if f"{to}:" not in before)]


def innermost_loops(text: str) -> list[list[str]]:
    """Return the instructions of each innermost loop of a kernel, in the order of the code; prologue and epilogue do
    not count. Of a kernel that has no loop: its own.

    ``text``: the result of ``disassembled``. A loop is the code between a label and the last branch back to it.
    """
    labels: dict[str, int] = {}
    ends: dict[int, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif (instruction := _INSTRUCTION.match(line)) and instruction[1].strip() != "NOP":
            branch = _BRANCH.search(instruction[1])
            # The code ends with a branch to itself, which nothing reaches.
            if branch and labels.get(branch[1], len(code)) < len(code):
                ends[labels[branch[1]]] = len(code)
            code.append(instruction[1])
    loops = [
        code[begin : end + 1]
        for begin, end in sorted(ends.items())
        if not any(begin <= other and last <= end and other != begin for other, last in ends.items())
    ]
    return loops or [code]


def hidden_exponentials(loop: list[str]) -> int:
    """How many exponentials each thread computes while the tensor cores multiply: between the last two waits of a loop
    for products, of which the former leaves one product under way."""
    waits = [i for i, instruction in enumerate(loop) if "WARPGROUP.DEPBAR" in instruction]
    return sum("MUFU.EX2" in instruction for instruction in loop[waits[-2] : waits[-1]]) if len(waits) > 1 else 0
