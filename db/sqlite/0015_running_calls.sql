-- The running calls of a tenant, newest first, so that a page of them passes over no pending ones. All that run are of one
-- process, which finds its own among them.
drop index open_invocations_running;
create index open_invocations_running on open_invocations (tenant, id) where status = 'running';

delete from sqlite_stat1 where idx = 'open_invocations_running';
insert into sqlite_stat1 (tbl, idx, stat) values ('open_invocations', 'open_invocations_running', '1000 100 1');
