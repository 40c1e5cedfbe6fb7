"""From where on a figure is a sign. One line of reason each; none of these was fitted to a set of incidents.

Theory of operation. Two kinds. *Worse* compares what was waited with the baseline, and asks for a ratio and for an amount: a
ratio alone accuses a fleet that answers in 10 ms in place of 5, an amount alone one that was slow before. *Signs* compare what
comes from outside (arrivals, lengths, which adapters, how long a load takes, capacity, who is sent where) with the baseline:
a sign is a change large enough to explain waiting, and more than chance would make of so few requests.
"""

from __future__ import annotations

from typing import Final

FEW: Final = 20
"""Requests, below which a window is no baseline: a percentile of them is one of two values."""
SOME: Final = 50
"""Requests, below which confidence is low: the 99th percentile is the largest value, and half a tenth is two of them."""
MANY: Final = 200
"""Requests, from which on confidence may be high, and a 99th percentile is of more than one value."""
SIGMA: Final = 3.0
"""Standard errors: by chance in about one window of a thousand. Arrivals in bursts vary more than the test believes."""

MEAN_RATIO: Final = 1.5
"""Of mean times to first token, with ``MEAN_AMOUNT``: waits of a loaded server vary by a third between windows by themselves."""
MEAN_AMOUNT: Final = 0.05
"""Of the objective. 50 ms of a second: about one load, which was measured to take 37 to 219 ms."""
DOUBLED: Final = 2.0
"""Of mean or 90th percentile: beyond what varies by itself, so that a smaller amount will do."""
DOUBLED_AMOUNT: Final = 0.02
"""Of the objective, for a mean that doubled: two activations, which were measured to take 10 to 31 ms."""
TENTH_AMOUNT: Final = 0.1
"""Of the objective, for a 90th percentile that doubled; it jumps where a tenth of the requests are misses."""
TENTH_MEAN: Final = 1.25
"""The mean must have grown so much too, for that same reason."""
TAIL_RATIO: Final = 3.0
"""Of 99th percentiles, with ``TAIL_AMOUNT``: the noisiest figure, so it has to triple."""
TAIL_AMOUNT: Final = 0.5
"""Of the objective."""
LATE: Final = 0.03
"""Fall of attainment beyond chance: late requests come in bunches, so a hundredth may be one bunch."""
LOST: Final = 0.01
"""Growth of the share that got no answer, beyond chance: it should be none at all."""

ATTAINMENT: Final = 0.9
"""Below it a fleet limits even with nothing to compare: one in ten is late."""
ATTAINMENT_CHRONIC: Final = 0.5
"""The same where the baseline fares alike: that is how it is run, unless most are late."""
UNSERVED: Final = 0.05
"""Share without an answer, absolute: one in twenty."""
PREEMPTIONS: Final = 10.0
"""For 1,000 requests: the guardrail of ``loraledger replay``."""
PREEMPTIONS_CHRONIC: Final = 100.0
"""The same where the baseline fares alike: one request in ten is computed again."""

DEMAND: Final = 1.3
"""Ratio of arrivals or tokens: at 70 % of capacity 1.3 times as much leaves a queue without end."""
DEMAND_SLIGHT: Final = 1.1
"""Looked for only when nothing else explains it: near capacity a tenth more doubles a queue."""
HOT: Final = 0.1
"""Share of all requests that one adapter grew by, or rarely used ones together: a tenth, as for what is late."""
RARE: Final = 0.25
"""Of an even share of requests: an adapter asked for less than this is rarely used. Two requests in the window in any case."""
DIVERSITY: Final = 1.3
"""Ratio of effective numbers of adapters, with the reason of ``DEMAND``: so many more places would be needed."""

MISSES: Final = 0.05
"""Growth of the share of misses, beyond chance: each costs a load or an activation, ten and more times a hit's wait."""
LOAD_TIME: Final = 2.0
"""Ratio of median load times at equal size: a busy engine lets a load wait for its step, which is less than a load."""
LOAD_STEPS: Final = 3.0
"""Growth of load times to that of times between tokens: steps with prompts in them are longer than the mean one."""
LOADS_TIMED: Final = 3
"""Loads, below which there is no median to speak of."""
HELD: Final = 0.1
"""Share of its time that loads and activations hold an engine: queues grow by 1 / (1 - share), so a tenth shows."""
HALF: Final = 0.5
"""Of a whole: most of it."""
THRASH: Final = 0.05
"""GPU hit rate up to which a working set thrashes the slots: a few hits at the edges of a cycle."""
AGAIN: Final = 2
"""Uses of each adapter, below which most misses are first uses."""
PREPARATION: Final = 0.3
"""Share of preparation in time to first token: the largest part if the others are alike."""
OVER_SLOTS: Final = 0.2
"""Share of time with more adapters in flight than slots: the engine lets those beyond wait, and says so to nobody."""
STARVED: Final = 5.0
"""An adapter's oldest wait to the median one's, and over the objective: the others were served many times meanwhile."""

IMBALANCE: Final = 1.25
"""Requests of the busiest replica to the mean, and to its own share before: at 80 % of capacity it is full by this alone."""
IMBALANCE_ALONE: Final = 1.5
"""The same with nothing to compare: affinity makes shares uneven by itself."""
CLUSTERED: Final = 2.0
"""Mean wait on the busiest replica to that on the others."""
CRAMERS_V: Final = 0.3
"""A medium effect by Cohen (Statistical Power Analysis, 1988); with many requests any difference is beyond chance."""

P_VALUE: Final = 0.001
"""Of chi-squared: the tail beyond about three standard errors, as ``SIGMA``."""
ROOM: Final = 0.5
"""Of the objective: with nothing to compare, replicas that wait less than this on average can take more."""

KV_FULL: Final = 0.2
"""Share of samples with 90 % of the KV in use: of the time in which a new request finds no room."""
KV_ASKED: Final = 0.8
"""Mean tokens in flight to KV capacity: the gateway keeps room for whole answers, so with usual swings this is full."""
SHRUNK: Final = 0.9
"""Of capacities: rounding to blocks takes less than one in a thousand, so a tenth is something that takes memory."""
IMPLIED: Final = 0.7
"""The same where capacity is only inferred from use and tokens in flight, which is coarse."""
COMPUTE_BOUND: Final = 1.5
"""Ratio of mean times between tokens: prompts share steps with answers, so an engine short of compute slows both."""
