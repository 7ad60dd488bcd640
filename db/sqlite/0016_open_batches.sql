-- Open calls by the tenant, in batches of arrival: those that come now stand close together, whosever they are. By the tenant
-- alone the new calls of a thousand tenants with a backlog stood on a page each (4.2 of 9 KB of the log for each accept), and
-- a page was written anew for every one of them. A walk along a tenant's calls passes over all batches, half a microsecond
-- for each.

-- The time of the first ID of a batch: the batches have the order of the IDs, and so have the calls in them.
alter table open_invocations add column batch integer not null default 0;

drop index open_invocations_tenant;
create index open_invocations_tenant on open_invocations (batch, tenant, id, agent_id, mode, status, model, settlement_status);

-- As in 0001_initial.sql: what a large table looks like, read at open. From this it is known that there are few batches.
delete from sqlite_stat1 where idx = 'open_invocations_tenant';
insert into sqlite_stat1 (tbl, idx, stat) values
  ('open_invocations', 'open_invocations_tenant', '100000 1000 20 1 1 1 1 1 1');
