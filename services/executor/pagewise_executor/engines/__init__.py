"""Engines: what computes the logits of a step, over the KV pool. One runs a model of transformers, one OpenVINO."""
