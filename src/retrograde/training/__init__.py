"""A small trainer of language models, as `retrograde train config.toml` runs it.

It trains on text or tokens, with AdamW, gradient accumulation, bf16, DDP and FSDP2. Checkpoints contain no code and are
written completely or not at all; a run that was killed resumes from the last one, on a CPU with the same bits.
"""

from ._checkpoints import CheckpointError as CheckpointError
from ._config import Config as Config
from ._config import ConfigError as ConfigError
from ._config import config_of as config_of
from ._config import read_config as read_config
from ._data import Vocabulary as Vocabulary
from ._devices import backend_for as backend_for
from ._loop import Options as Options
from ._loop import Result as Result
from ._loop import TrainingError as TrainingError
from ._loop import load_model as load_model
from ._loop import train as train
