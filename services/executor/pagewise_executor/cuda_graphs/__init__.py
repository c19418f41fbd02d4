"""CUDA graphs of steps: of decodes alone with their sampling, and of decodes and prefill chunks up to the last norm."""
