"""AIME, GPQA Diamond and MATH-500 on running servers, and comparisons of two such runs.

Prompts, answers and grades are those of sgl-eval, SGLang's own evaluation client, whose graders are
NVIDIA NeMo-Skills'. Here is what is left to do around it:

    harness.py      the command line of the harness, why each option is set, and what it wrote
    runs.py         one benchmark on one server, what the server says of it, and the folder
    comparison.py   two runs of the same questions, question by question
"""
