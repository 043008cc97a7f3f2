"""OpenAI's Responses API: bodies become chats, answers become items and events."""
