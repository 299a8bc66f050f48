"""The settings: their schema and their sources (environment variables, files, command lines)."""

from memckpt.config.schema import DEFAULT_ANCHOR_PERIOD as DEFAULT_ANCHOR_PERIOD
from memckpt.config.schema import AgentConfig as AgentConfig
from memckpt.config.schema import CompressionConfig as CompressionConfig
from memckpt.config.schema import DomainLevel as DomainLevel
from memckpt.config.schema import ErasureConfig as ErasureConfig
from memckpt.config.schema import HalfPrecision as HalfPrecision
from memckpt.config.schema import LossyConfig as LossyConfig
from memckpt.config.schema import MemckptConfig as MemckptConfig
from memckpt.config.schema import PowerSGD as PowerSGD
from memckpt.config.schema import Quantized8 as Quantized8
from memckpt.config.schema import RandomK as RandomK
from memckpt.config.schema import RedoChoice as RedoChoice
from memckpt.config.schema import RedoMode as RedoMode
from memckpt.config.schema import ResumeChoice as ResumeChoice
from memckpt.config.schema import Security as Security
from memckpt.config.schema import SparseConfig as SparseConfig
from memckpt.config.schema import StorageConfig as StorageConfig
from memckpt.config.schema import StorageMode as StorageMode
from memckpt.config.schema import TopK as TopK
from memckpt.config.schema import check_resume as check_resume
from memckpt.config.schema import parse_resume as parse_resume
