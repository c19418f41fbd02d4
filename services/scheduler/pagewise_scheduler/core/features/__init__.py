"""What stands beside the loop: adapters, grammars, segments, beams, drafts, fair shares."""
