"""Published reversible architectures as small, complete models."""

from ._cache import KVCache as KVCache
from ._chunked import ChunkedFeedForward as ChunkedFeedForward
from ._chunked import chunked_cross_entropy as chunked_cross_entropy
from .axial import AxialImageTransformer as AxialImageTransformer
from .encoder_decoder import EncoderDecoder as EncoderDecoder
from .graph import DeepGraphNetwork as DeepGraphNetwork
from .language_model import ReversibleLM as ReversibleLM
from .momentum_resnet import MomentumResNet as MomentumResNet
from .point_cloud import PointCloudTransformer as PointCloudTransformer
from .rev_bifpn import RevBiFPN as RevBiFPN
from .rev_col import RevCol as RevCol
from .rev_vit import RevViT as RevViT
from .reversible_ode import ReversibleODE as ReversibleODE
from .revnet import RevNet as RevNet
from .two_modality import TwoModalityTransformer as TwoModalityTransformer
