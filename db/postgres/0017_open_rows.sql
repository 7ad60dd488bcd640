-- How the rows of open calls lie. Each is written twice: when the call is accepted, and when it is claimed.

-- Where a page has room for both, the log says only what differs between them: measured, a claim writes 550 bytes instead of
-- 1070, and a whole call 3,320 instead of 3,960. A page that is full already stays as it is until its calls have ended.
alter table open_invocations set (fillfactor = 50);

-- Two entries are alike in these only when they are of one call. Looking for others to put together with them is in vain:
-- measured, 28 instead of 31 µs of the server for a claim.
alter index open_invocations_pkey set (deduplicate_items = off);
alter index open_invocations_tenant set (deduplicate_items = off);
alter index open_invocations_pending set (deduplicate_items = off);
