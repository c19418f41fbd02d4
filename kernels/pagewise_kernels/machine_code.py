"""How many instructions the loops of a compiled kernel have: read from its machine code, which needs no GPU."""

import re
import subprocess
import tempfile

from triton import knobs

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*?(\.L_x_\d+)")


def loop_sizes(cubin: bytes) -> list[int]:
    """Instructions of each innermost loop of a kernel, in the order of the code; prologue and epilogue do not count.
    Of a kernel that has no loop: its own.

    ``cubin``: the kernel as Triton keeps it (``asm["cubin"]``). A loop is what lies between a label and the last branch
    back to it. The disassembler is the one that Triton brings along.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  # nosec B603 # no shell
    return loop_sizes_of_text(text)


def loop_sizes_of_text(text: str) -> list[int]:
    """The same for what the disassembler has printed."""
    labels: dict[str, int] = {}
    ends: dict[int, int] = {}
    count = 0
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = count
        elif (instruction := _INSTRUCTION.match(line)) and instruction[1].strip() != "NOP":
            branch = _BRANCH.search(instruction[1])
            # The code ends with a branch to itself, which nothing reaches.
            if branch and labels.get(branch[1], count) < count:
                ends[labels[branch[1]]] = count
            count += 1
    sizes = [
        end - begin + 1
        for begin, end in sorted(ends.items())
        if not any(begin <= other and last <= end and other != begin for other, last in ends.items())
    ]
    return sizes or [count]
