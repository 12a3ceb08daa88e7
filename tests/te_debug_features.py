"""The example configs of Transformer Engine's documentation of its debug features, each as it stands there."""

LOG_TENSOR_STATS = """
example_tensor_stat_collection:
  enabled: True
  layers:
    layer_name_regex_pattern: .*(fc1|self_attention).*
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors_struct:
        - tensor: activation
          stats: [mean]
          freq: 10
          start_step: 5
          end_step: 100
        - tensor: gradient
          stats: [mean, max, min]
          freq: 2
          start_end_list: [[0, 20], [80, 100]]
        - tensor: weight
          stats: [dynamic_range]
"""

LOG_FP8_TENSOR_STATS = """
example_fp8_tensor_stat_collection:
  enabled: True
  layers:
    layer_types: [layernorm_linear]
  transformer_engine:
    LogFp8TensorStats:
        enabled: True
        tensors_struct:
        - tensor: activation
          stats: [underflows%, overflows%]
          freq: 1
        - tensor: gradient
          stats: [overflows%]
          freq: 5
        start_step: 0
        end_step: 80
"""

DISABLE_FP8_GEMM = """
example_disable_fp8_gemm:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    DisableFp8Gemm:
      enabled: True
      gemms: [dgrad, wgrad]
"""

DISABLE_FP8_LAYER = """
example_disable_fp8_layer:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    DisableFp8Layer:
      enabled: True
"""

PER_TENSOR_SCALING = """
example_per_tensor_scaling:
  enabled: True
  layers:
    layer_types: [transformer_layer.self_attn.layernorm_q]
  transformer_engine:
      PerTensorScaling:
        enabled: True
        margin: 1
        gemms: [dgrad]
        tensors: [weight, activation]
"""

FAKE_QUANT = """
example_fake_quant_fp8:
  enabled: True
  layers:
    layer_types: [transformer_layer.layernorm_mlp.fc1]
  transformer_engine:
      FakeQuant:
        enabled: True
        quant_format: FP8E5M2
        gemms_struct:
        - gemm: fprop
          tensors: [activation, weight]
        - gemm: dgrad
          tensors: [gradient]
"""

EXAMPLES = (
    LOG_TENSOR_STATS,
    LOG_FP8_TENSOR_STATS,
    DISABLE_FP8_GEMM,
    DISABLE_FP8_LAYER,
    PER_TENSOR_SCALING,
    FAKE_QUANT,
)
