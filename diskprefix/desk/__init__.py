"""Commands and pages for people. Nothing else imports them."""
