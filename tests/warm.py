"""What ranks would otherwise import and do first, each for itself: loaded once, before they fork.

Nothing here may start a thread, which a fork would lose.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import transformers.models.gpt2.modeling_gpt2
from torch import nn

import autopar_torch.integrations
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart

assert pytest and transformers and autopar_torch.integrations  # to have them is all
PATH = list(sys.path)
torch.set_num_threads(1)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
trace(nn.Linear(2, 2), take_apart((torch.ones(2, 2),), {})[0], wanted=None)
