"""The features beside the loop: adapters, grammars, segments, beams, drafts, fair shares, prefetches, write-back."""
