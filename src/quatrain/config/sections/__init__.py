"""The sections of the configuration, together by what they are about."""
