"""AIME, GPQA Diamond and MATH-500 on running servers, and comparisons of two such runs.

Prompts, answers and grades are those of sgl-eval, SGLang's own evaluation client, whose graders are
NVIDIA NeMo-Skills'. Here is what is left to do around it:

    questions.py    the data sets, from the harness, from the hub or from a file
    harness.py      the command line of the harness, why each option is set, and what it wrote
    server.py       what a running server says of itself
    runs.py         one benchmark on one server, and its folder
    comparison.py   two runs of the same questions, question by question, and the report
"""
