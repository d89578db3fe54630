"""Open Inference Protocol v2: message schemas and the binary tensor extension.

Sources: the KServe "V2 Inference Protocol" and Triton's "Binary tensor data extension"; where the
two leave a choice, what ``tritonclient[http]`` sends and expects decides.
"""

from service.oip.codec import Tensor, decode_infer, encode_infer
from service.oip.schema import InferRequest, RequestOutput

__all__ = ["InferRequest", "RequestOutput", "Tensor", "decode_infer", "encode_infer"]
