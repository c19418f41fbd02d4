"""Where drafts come from, and how long they are."""
