"""Anthropic's Messages API: bodies become chats, answers become content blocks and events."""
