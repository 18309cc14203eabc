r"""Makes short demonstrations for GSM8K from the calculations annotated in its solutions.

    python examples/gsm8k_demonstrations.py train.jsonl demonstrations.jsonl

`She sold 48/2 = <<48/2=24>>24 … #### 72` becomes `<think>48/2=24, 48+24=72</think>\n<answer>72</answer>` in
the column `completion`. Rows without an annotated calculation are left out and counted.
"""

import json
import re
import sys
from pathlib import Path


def completion(answer: str) -> str | None:
    """The demonstration for the solution `answer`; None if it has no annotated calculation."""
    calculations = re.findall(r"<<(.+?)>>", answer)
    result = answer.rpartition("####")[2].strip()
    return f"<think>{', '.join(calculations)}</think>\n<answer>{result}</answer>" if calculations else None


def convert(source: Path, target: Path) -> tuple[int, int]:
    """Writes demonstrations for `source` to `target`; returns the numbers of rows written and left out."""
    with source.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    rows = [row | {"completion": completion(row["answer"])} for row in rows]
    kept = [row for row in rows if row["completion"] is not None]
    target.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return len(kept), len(rows) - len(kept)


if __name__ == "__main__":
    written, left_out = convert(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{written} demonstrations written, {left_out} rows without an annotation left out")
