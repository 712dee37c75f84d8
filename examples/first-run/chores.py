"""The four families of chores, as wordings: what tasks, warm start and simulator are all made of.

Invariant: a task of the `train` split and one of `held-out` share no cue, no opening, no request and no name, so no
instruction of one is ever an instruction of the other; the `warm` split joins an opening of one with a request of the
other, so the warm start meets every word but never a graded instruction. Called by make_tasks.py, make_policy.py and
simulate.py.

In each family the right action is a choice from four fixed words. The choice follows from the cue, a phrase that means
one of the words without naming it; in `ticket` the cue stands in a file that has to be read first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held-out", "warm"]


@dataclass(frozen=True)
class Family:
    """One kind of chore. `cues[choice]`, `openings`, `requests` and `names` are halves: (train, held-out)."""

    name: str
    choices: tuple[str, str, str, str]
    cues: dict[str, tuple[list[str], list[str]]]
    openings: tuple[list[str], list[str]]
    requests: tuple[list[str], list[str]]
    names: tuple[list[str], list[str]]
    question: str  # asks for the choice outright, without any tool
    cue_in_file: bool = False  # the instruction does not hold the cue


@dataclass(frozen=True)
class Chore:
    """One concrete chore: the instruction, the files at the start, and what has to be there at the end.

    `expected` maps paths to texts (trailing newlines do not count); a path in `absent` must be gone.
    """

    family: str
    choice: str
    instruction: str
    files: dict[str, str]
    expected: dict[str, str]
    absent: tuple[str, ...] = ()


LOG_LEVEL = Family(
    name="log-level",
    choices=("debug", "info", "warning", "error"),
    cues={
        "debug": (
            ["every detail", "each single step", "the full trace", "all its internals", "even the smallest thing"],
            ["each detail of every step", "the smallest internals", "the trace of every single call"],
        ),
        "info": (
            ["the usual messages", "its normal work", "routine events", "the ordinary course", "regular progress"],
            ["the usual events", "normal progress", "its ordinary routine"],
        ),
        "warning": (
            ["what looks odd", "early signs of trouble", "strange values", "what may go wrong", "suspicious things"],
            ["what looks strange", "signs that something may go wrong", "odd or suspicious values"],
        ),
        "error": (
            ["what failed", "crashes", "what broke", "nothing but faults", "fatal breakdowns"],
            ["nothing but crashes", "what broke or failed", "fatal faults"],
        ),
    },
    openings=(
        [
            "The file log_level holds one word: debug, info, warning or error.",
            "The {name} service takes its log level from log_level (debug, info, warning, error).",
            "Please change log_level for the {name} service.",
        ],
        [
            "Our {name} service reads the word in log_level: error, warning, info or debug.",
            "Adjust the log level of {name} in the file log_level (error, warning, info, debug).",
            "In log_level stands how much the {name} service writes.",
        ],
    ),
    requests=(
        [
            "Set it so that {name} logs {cue}.",
            "We want to see {cue} in the log.",
            "Choose the level that shows {cue}.",
        ],
        [
            "Put the level there that gives us {cue}.",
            "The log should have {cue}.",
            "The team of {name} asks for {cue}.",
        ],
    ),
    names=(["billing", "search", "mail", "login"], ["payment", "chat", "upload", "report"]),
    question="Which log level shows {cue}?",
)

NOTE = Family(
    name="note",
    choices=("today", "later", "archive", "trash"),
    cues={
        "today": (
            ["cannot wait", "needs an answer before lunch", "is very urgent", "is due right now", "has top priority"],
            ["needs an urgent answer", "is due before lunch", "has to be answered right now"],
        ),
        "later": (
            ["can wait for a week", "is in no hurry", "has plenty of time", "can rest until Monday", "is not due yet"],
            ["can rest for a week", "has time until Monday", "is not in a hurry yet"],
        ),
        "archive": (
            [
                "is settled and kept on record",
                "is done, but the auditors may ask for it",
                "is kept for reference",
                "is finished and belongs with the old papers",
                "is part of our history",
            ],
            ["is settled and kept for the auditors", "is finished, but part of the record", "is old and for reference"],
        ),
        "trash": (
            ["is spam", "is worthless", "is a useless copy", "is junk", "is an advert nobody wants"],
            ["is useless junk", "is a worthless advert", "is spam nobody wants"],
        ),
    },
    openings=(
        [
            "There is one note in inbox.",
            "Sort the note from {name} into today, later, archive or trash.",
            "The folders are today, later, archive and trash.",
        ],
        [
            "A note from {name} came into inbox.",
            "Please clear inbox: the folders for it are trash, archive, later and today.",
            "Each note goes from inbox to trash, archive, later or today.",
        ],
    ),
    requests=(
        [
            "It {cue}: move it to the right folder.",
            "The note {cue}, so put it where it belongs.",
            "Move it out of inbox; {name} says that it {cue}.",
        ],
        [
            "As it {cue}, choose its folder and move it.",
            "I looked at it: it {cue}. Put it away.",
            "Since the one from {name} {cue}, take it to its folder.",
        ],
    ),
    names=(["Anna", "Boris", "Clara", "David"], ["Emma", "Felix", "Greta", "Henry"]),
    question="Where does a note go that {cue}?",
)

BACKUP = Family(
    name="backup",
    choices=("hour", "week", "month", "year"),
    cues={
        "hour": (
            [
                "every sixty minutes",
                "when the clock strikes",
                "around the clock",
                "many times from morning to night",
                "all day and all night",
            ],
            [
                "around the clock, day and night",
                "every time the clock strikes",
                "many times in sixty times sixty minutes",
            ],
        ),
        "week": (
            ["every Sunday", "once in seven days", "on Friday night", "from Monday to Monday", "on Saturdays"],
            ["every Friday", "once from Sunday to Sunday", "on Saturday night"],
        ),
        "month": (
            [
                "when the rent is due",
                "once in thirty days",
                "when salaries are paid",
                "twelve times between two winters",
                "when a calendar page is turned",
            ],
            ["when rent and salaries are due", "every thirty days", "with each calendar page"],
        ),
        "year": (
            ["at Christmas", "once in 365 days", "every spring", "on New Year's Eve", "when winter comes"],
            ["every 365 days", "when spring comes", "on each Christmas Eve"],
        ),
    },
    openings=(
        [
            "The backup of {name} runs every day, as backup.conf says.",
            "Edit backup.conf, where it says day.",
            "In backup.conf the word day can become hour, week, month or year.",
        ],
        [
            "Look after the backup of {name}: backup.conf has it run each day.",
            "Change the word day in backup.conf to year, month, week or hour.",
            "backup.conf makes a copy of {name} per day.",
        ],
    ),
    requests=(
        [
            "From now on it should run {cue}.",
            "We need the backup of {name} {cue}.",
            "Make it happen {cue} instead.",
        ],
        [
            "It is better to have it {cue}.",
            "The owner of {name} wants it {cue}.",
            "Let it be made {cue} from now on.",
        ],
    ),
    names=(["photos", "music", "mail", "letters"], ["films", "books", "notes", "papers"]),
    question="A backup that runs {cue} runs once an hour, week, month or year?",
)

TICKET = Family(
    name="ticket",
    choices=("money", "network", "account", "device"),
    cues={
        "money": (
            [
                "I was charged twice",
                "the invoice is wrong",
                "my refund is late",
                "the price is too high",
                "I paid too much",
            ],
            ["the refund is wrong", "I paid twice", "the price on my invoice is too high"],
        ),
        "network": (
            [
                "the connection drops",
                "pages load slowly",
                "there is no internet",
                "the signal is weak",
                "downloads never end",
            ],
            ["my internet signal drops", "the connection is slow and weak", "no page ever loads"],
        ),
        "account": (
            [
                "I forgot my password",
                "I cannot sign in",
                "my user name is unknown",
                "I am locked out",
                "the sign-in code never comes",
            ],
            ["my password and user name fail", "I cannot sign in, it is locked", "I forgot the sign-in code"],
        ),
        "device": (
            [
                "the screen is cracked",
                "the battery is dead",
                "a key fell off the keyboard",
                "the fan is loud",
                "the power button is stuck",
            ],
            ["the keyboard is dead", "the fan or battery is broken", "the screen and a button are cracked"],
        ),
    },
    openings=(
        [
            "Read ticket.txt from {name}.",
            "A customer wrote ticket.txt.",
            "The teams are money, network, account and device.",
        ],
        [
            "There is a new ticket.txt by {name}.",
            "Please look into ticket.txt first.",
            "Our teams (device, account, network, money) wait for ticket.txt.",
        ],
    ),
    requests=(
        [
            "Write the name of the team that handles it (money, network, account, device) into team.txt.",
            "Then put the right team into team.txt.",
            "See what it is about and write to team.txt which team takes it.",
        ],
        [
            "Find out who takes care of it and put that team into team.txt.",
            "Write into team.txt which of device, account, network and money it is for.",
            "Which team is it for? Write it to team.txt after you read it.",
        ],
    ),
    names=(["Ines", "Jonas", "Karin", "Lukas"], ["Maria", "Nils", "Olga", "Paul"]),
    question="Which team takes care of this: {cue}?",
    cue_in_file=True,
)

FAMILIES: dict[str, Family] = {family.name: family for family in (LOG_LEVEL, NOTE, BACKUP, TICKET)}


def halves(split: Split) -> tuple[int, int]:
    """Which half an opening and a request of `split` come from; for `warm` the caller draws one of both mixtures."""
    return {"train": (0, 0), "held-out": (1, 1), "warm": (0, 1)}[split]


def compose(family: Family, choice: str, cue: str, opening: str, request: str, name: str) -> Chore:
    """The chore of these pieces."""
    instruction = f"{opening} {request}".format(name=name, cue=cue)
    if family is LOG_LEVEL:
        start = {"log_level": "none\n"}
        return Chore(family.name, choice, instruction, start, {"log_level": f"{choice}\n"})
    if family is NOTE:
        text = f"A note from {name}.\n"
        start = {"inbox/note.txt": text} | {f"{folder}/.keep": "" for folder in family.choices}
        others = tuple(f"{folder}/note.txt" for folder in family.choices if folder != choice)
        return Chore(family.name, choice, instruction, start, {f"{choice}/note.txt": text}, ("inbox/note.txt", *others))
    if family is BACKUP:
        config = f"what = {name}\nevery = {{}}\n"
        return Chore(
            family.name,
            choice,
            instruction,
            {"backup.conf": config.format("day")},
            {"backup.conf": config.format(choice)},
        )
    ticket = f"{cue[0].upper()}{cue[1:]}.\n"
    return Chore(family.name, choice, instruction, {"ticket.txt": ticket}, {"ticket.txt": ticket, "team.txt": f"{choice}\n"})


def draw(rng: random.Random, family: Family, split: Split, choice: str | None = None) -> Chore:
    """A random chore of `family` in `split`."""
    choice = choice or rng.choice(family.choices)
    first, second = halves(split)
    cue_half = first
    if split == "warm":
        cue_half = rng.randrange(2)
        first = rng.randrange(2)
        second = 1 - first
    return compose(
        family,
        choice,
        rng.choice(family.cues[choice][cue_half]),
        rng.choice(family.openings[first]),
        rng.choice(family.requests[second]),
        rng.choice(family.names[cue_half]),
    )
