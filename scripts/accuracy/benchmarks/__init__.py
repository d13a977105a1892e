"""AIME, GPQA Diamond and MATH-500 on running servers, and comparisons of two such runs.

Prompts, answers and grades are those of sgl-eval, SGLang's own evaluation client, whose graders are
NVIDIA NeMo-Skills'. Here is what is left to do around it.
"""
