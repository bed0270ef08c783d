"""Soak: a real server with a thousand streams at once, in calm, in chaos and at its end. `make soak`.

    python -m tests.serving.soak [steady] [chaos] [sigterm] --streams 1000 --seconds 300 --seed 1

Every answer is known beforehand: the model computes the same tokens in whatever batch, so what `LLM` answers in this
process is what the server must answer, to the letter. Exit status 1 if anything was not as it must be.
"""
