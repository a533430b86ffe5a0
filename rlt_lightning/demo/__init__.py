"""`rlt demo`: the paper's finding in miniature, and what `make finding` shares with it.

    command.py   the options of `rlt demo`
    run.py       run arms of several seeds side by side
    arms.py      the arms, and the stages of one seed
    stages.py    a stage: an `rlt` command in a process of its own
    gates.py     whether a base can do what the comparison needs
    figures.py   `finding.json`
    page.py      tables, explanations, and what the terminal shows
    picture.py   `finding.svg`

Nothing here imports PyTorch at its top: the first line of `rlt demo` appears at once.
"""
