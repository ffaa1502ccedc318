"""x"""


def tune() -> None:
    "x"
