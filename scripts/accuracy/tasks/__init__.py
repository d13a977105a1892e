"""Tasks whose every step a program can check, one file each.

    problem = TASKS["pointer-chase"].make(seed=0, facts=128, hops=80, restatements=3)
    problem.prompt, problem.answer, problem.max_tokens
    problem.grade(text)

Only the standard library is needed. All are learned by a transformer of two to four layers with a
token a word; none is evidence about natural text.
"""

from scripts.accuracy.tasks import (
    addition,
    majority,
    needle,
    pointer_chase,
    self_written,
    variable_tracking,
)
from scripts.accuracy.tasks.problem import Grade, Problem, Task

_MODULES = (pointer_chase, self_written, majority, variable_tracking, needle, addition)
TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in _MODULES}

__all__ = ["TASKS", "Grade", "Problem", "Task"]
