"""What ranks would import one by one while they run; the process they are forked from has it."""

import accelerate.utils  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict  # noqa: F401
import transformers.distributed.tensor_parallel  # noqa: F401

import vort.cli
import vort.lab.experiments
import vort.lab.training.forecast  # noqa: F401
