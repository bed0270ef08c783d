"""What runs when: sequences, the scheduler, the step loop. No model, no torch."""

from pagetable.engine.engine import Engine, Runner, StepStats
from pagetable.engine.errors import RequestError
from pagetable.engine.sampling_params import SamplingParams
from pagetable.engine.scheduler import SCHEDULING_POLICIES, Scheduler
from pagetable.engine.sequence import FinishReason, Sequence, TokenIds
from pagetable.engine.step import PromptLogprobsBatch, SamplingBatch, Step, StepOutput, TokenLogprobs

__all__ = [
    "SCHEDULING_POLICIES",
    "Engine",
    "FinishReason",
    "PromptLogprobsBatch",
    "RequestError",
    "Runner",
    "SamplingBatch",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "Step",
    "StepOutput",
    "StepStats",
    "TokenIds",
    "TokenLogprobs",
]
