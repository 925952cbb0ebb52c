"""What messages and events mean: the faults that a run meets, what each is called, and what to try."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """name: the fault in a few words. pattern: found in a log message, the reason of an end, or `event KIND`.

    grave: whether it can end a run. Rules are tried in order, and a message belongs to the first that it matches.
    """

    name: str
    pattern: re.Pattern[str]
    remedy: str
    grave: bool = True


def _rule(name: str, pattern: str, remedy: str, grave: bool = True) -> Rule:
    return Rule(name, re.compile(pattern, re.S), remedy, grave)


AGAIN = "Start the same command again: it resumes from its newest complete checkpoint."
MACHINE = (
    "Look at the machine of the rank that is named: out of memory (dmesg), a fault of its card, a reboot."
)

# Not within a path or a URL, such as s3://data/SIGIR.
SIGNAL = r"(?<![\w/.-])SIG(?:TERM|INT|HUP|QUIT|USR1|USR2|XCPU)(?![\w/.-]*/)\b"
LOST_PEER = (
    r"[Cc]onnection (?:closed|reset|refused)|(?<![\w/.-])(?:by|remote|the) peer(?![\w/.-])|"
    r"(?<![\w/.-])peer (?:closed|is gone)"
)
DIED = "a rank was killed, or died"

RULES = (
    # First what costs a warning only, whatever its cause. What a rank says of itself comes before what others say of it.
    _rule(
        "something beside training failed",
        r"no (?:evaluation|sample|tasks) at step|is off from now on|sampling failed|scoring tasks failed|"
        r"kept in memory for now|no log file for",
        "Training goes on without it; fix what the message names before the next start.",
        grave=False,
    ),
    _rule(
        "out of memory",
        r"out of memory",
        "Change one of the three keys in the log below the memory table.",
    ),
    _rule(
        "a phase outlasted its bound: a rank hangs",
        r"has taken [\d.]+ s, and resilience\.|event watchdog",
        "Compare the stacks below: the odd rank is stuck, the others wait for it. If none is, raise the key that is named. "
        + AGAIN,
    ),
    _rule(
        "copies of the same parameters differ: a bit flipped",
        r"copies differ after step|is not what the other ranks hold|differs between the ranks|event copies_differ",
        "Nothing bad was saved. If it comes again, take the machine that is named out of use.",
    ),
    _rule(
        "too many bad steps, and roll-backs have not helped",
        r"resilience\.max_rollbacks = |no checkpoint from before step",
        "Lower optimizer.lr, or look at the data of these steps (scripts/inspect_data.py); save more often.",
    ),
    _rule(
        "rolled back to an earlier checkpoint",
        r"Back to step \d+|event rolled_back",
        "Nothing, if it is rare; else look at the data of these steps, or lower optimizer.lr.",
        grave=False,
    ),
    _rule(
        "a step was skipped: its loss or gradient was not finite",
        r"step \d+ was skipped|event skipped",
        "Nothing, if it is rare. `transient` points to the machine of the rank, `deterministic` to data or learning rate.",
        grave=False,
    ),
    _rule(
        "a spike of the loss or of the gradient norm",
        r"is a spike:|event spike",
        "Nothing, if it is rare; resilience.spikes says what is done about it.",
        grave=False,
    ),
    _rule(
        "too many saves in a row failed",
        r"saves in a row have failed|the last checkpoint, of step \d+, failed",
        "Make room, or fix what the message names. " + AGAIN,
    ),
    _rule(
        "a state on a node was damaged, or incomplete",
        r"the local state of step \d+|local states of step|event local_damaged",
        "A copy or an older state was used. If it comes again, look at the memory of that node, or raise checkpoint.peers.",
        grave=False,
    ),
    _rule(
        "a state was not kept on the nodes",
        r"keeping step \d+ on the nodes failed|event local_save_failed",
        "Make room in checkpoint.local_dir, or lower checkpoint.peers; the next one is tried.",
        grave=False,
    ),
    _rule(
        "nodes of an elastic run were lost, or joined",
        r"event nodes_changed",
        "Nothing: the run has gone on with those that were there.",
        grave=False,
    ),
    _rule(
        "a slow node has left an elastic run",
        r"this node leaves the run at step",
        "Look at that machine; another node can join at any time.",
        grave=False,
    ),
    _rule(
        "a save failed",
        r"saving step \d+ failed|event save_failed|are free in",
        "Make room on that disk, or look at that node's mount; the next interval tries again.",
        grave=False,
    ),
    _rule(
        "a disk is full, or a quota is used up",
        r"No space left on device|Disk quota exceeded",
        "Make room on that disk. " + AGAIN,
    ),
    _rule(
        "no usable checkpoint",
        r"every checkpoint in .* is damaged|no checkpoint in .* can be used|cannot be loaded: ",
        "Restore a checkpoint from a copy, or begin a new history; see docs/recovery.md, Damaged checkpoints.",
    ),
    _rule(
        "a damaged checkpoint was passed over",
        r"is damaged: |\.damaged-step|has lost its manifest|moved out of the way|event fallback",
        "Look at the disk: files change only if something is wrong with it. The run went on from the checkpoint before.",
        grave=False,
    ),
    _rule(
        "remains of a save that was killed",
        r"left by a process that ended while saving",
        "Nothing: they have been removed.",
        grave=False,
    ),
    _rule(
        "the folder of the run cannot be used",
        r"cannot be written to|is another folder than on|is in use by|cannot be locked|cannot be opened \(",
        "Point run.output_dir at a folder that all nodes share and that you may write to, or choose another run.name.",
    ),
    _rule(
        "a run that died held this folder",
        r"taking over from process|has no locks",
        "Nothing: the lock of a dead process holds nobody up.",
        grave=False,
    ),
    _rule(
        "data or tokenizer have changed since the checkpoint",
        r"is not what .* was trained on|event changed_data|Restore the files and data\.sources",
        "Restore them, or set checkpoint.allow_changed_data = true to go on with what is there.",
    ),
    _rule(
        "damaged data, or of another tokenizer",
        r"token id \d+|another checksum than when|beyond the vocabulary|bytes, .*not a whole number|is truncated|"
        r"has fewer than|no document|tokens?, and one sequence needs",
        "Look at the data with scripts/inspect_data.py, and prepare it again.",
    ),
    _rule(
        "the configuration cannot be continued",
        r"cannot be continued with another model or data order|does not fit the configured model",
        "Set the key back, or begin a new run with checkpoint.init.",
    ),
    _rule(
        "a rank is slow, and all wait for it",
        r"is slow at step|event straggler",
        "A warm card, a busy machine or a slow disk: look at the machine of that rank. Training is not wrong.",
        grave=False,
    ),
    _rule(
        "stopped on request",
        SIGNAL + r"|resilience\.time_limit_s = |another rank was asked to stop|stopping after this step|"
        r"stopped before the first step|leaving at once|is near",
        AGAIN,
        grave=False,
    ),
    _rule(
        "an error in the program on one rank",
        rf"rank \d+ fails in (?!.*(?:[Cc]onnection|gloo|NCCL|{LOST_PEER}))",
        "Read the error. " + AGAIN,
    ),
    # What follows from the death of another rank.
    _rule(
        DIED,
        rf"no answer from ranks? |(?:store|process) through which the ranks met is gone|{LOST_PEER}",
        MACHINE + " " + AGAIN,
    ),
    _rule(
        "a rank failed, and the others with it", r"the first to fail was rank \d+", "Read its error. " + AGAIN
    ),
)
