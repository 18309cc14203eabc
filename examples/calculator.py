"""A tool: the model calls a calculator for word problems with numbers of two digits.

    python examples/calculator.py
    quatrain train examples/calculator.yaml

The first command writes the word problems and the demonstrations of the warm start to `calculator/`. Half of
the demonstrations guess an answer, as somebody does who estimates; the others call the calculator as Llama 3
writes calls, and answer with its result. So the warm start teaches both forms, and the rewards teach which of
them to take.
"""

import ast
import json
import operator
import random
from pathlib import Path

FOLDER = Path("calculator")
NUM_TRAIN, NUM_HELDOUT = 2000, 200
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Zoe")
OBJECTS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
STORIES = {"+": ("buys {b} more", "finds {b} more", "gets {b} more"), "-": ("loses {b}", "sells {b}")}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST_EXPRESSION = 100


def calculate(expression: str) -> str:
    """Calculates with numbers.

    Args:
        expression: Numbers with +, -, *, / and parentheses, as in "12*(3+4)".
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"an expression has at most {LONGEST_EXPRESSION} characters")
    return f"{value(ast.parse(expression, mode='eval').body):.15g}"


def value(node: ast.expr) -> float:
    """The value of a parsed expression; raises ValueError for anything but numbers and their operators."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("an expression consists of numbers, +, -, *, / and parentheses")


def problem(rng: random.Random, heldout: bool) -> dict:
    """A word problem; the operands decide whether it is held out."""
    while True:
        a, b, sign = rng.randint(10, 99), rng.randint(10, 99), rng.choice("+-")
        if (sign == "+" or b < a) and ((7 * a + 3 * b) % 10 == 0) == heldout:
            break
    story = rng.choice(STORIES[sign]).format(b=b)
    text = f"{rng.choice(NAMES)} has {a} {rng.choice(OBJECTS)} and {story}. How many now?"
    expression = f"{a}{sign}{b}"
    return {"prompt": [message("user", text)], "answer": calculate(expression), "expression": expression}


def demonstrations(rng: random.Random, row: dict) -> list[dict]:
    """A guess, a call of the calculator, and the answer after its result."""
    call = f'calculate.call(expression="{row["expression"]}")'
    result = [message("assistant", call), message("tool", row["answer"])]
    guess = max(0, int(row["answer"]) + rng.randint(-9, 9))
    return [
        {"prompt": row["prompt"], "completion": answered(guess), "called": False},
        {"prompt": row["prompt"], "completion": call, "called": True},
        {"prompt": [*row["prompt"], *result], "completion": answered(row["answer"]), "called": True},
    ]


def answered(number: object) -> str:
    return f"<answer>{number}</answer>"


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def write(name: str, rows: list[dict]) -> None:
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    rng = random.Random(0)
    train = [problem(rng, heldout=False) for _ in range(NUM_TRAIN)]
    shown = [each for row in train for each in demonstrations(rng, row)]
    FOLDER.mkdir(exist_ok=True)
    write("train.jsonl", train)
    write("heldout.jsonl", [problem(rng, heldout=True) for _ in range(NUM_HELDOUT)])
    write("demonstrations.jsonl", shown)
    write("guesses.jsonl", [row for row in shown if not row["called"]])
