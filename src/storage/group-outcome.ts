// What comes of a group of works: how those that are done are answered, and which run again.
import type { CommandEffects } from "./commands.ts";
import { sqliteCommitFailure, sqliteFailure } from "./failures.ts";
import type { Tx } from "./store.ts";

export interface WaitingWrite {
  /** A command gives its output at once, and needs no transaction made for it. */
  run(effects: CommandEffects, txOf: (effects: CommandEffects) => Tx): Bun.MaybePromise<unknown>;
  /** Whose turn it takes. The process's own work is FOR_ALL. */
  readonly tenant: string;
  /** Whether it has a savepoint of its own from the first: a tenant can make it fail, as by a name that is in use. */
  readonly mayFail: boolean;
  /** About how many it carries. */
  readonly bytes: number;
  resolve(value: unknown): void;
  reject(error: unknown): void;
}

/** A work failed without a savepoint: nothing of the group may stay. */
export class WorkFailed extends Error {}

/** The failure of one work undid the others with it; they may succeed without that one. */
export class GroupLost extends Error {
  readonly work: WaitingWrite;

  constructor(work: WaitingWrite, cause: unknown) {
    super("the transaction was rolled back", { cause });
    this.work = work;
  }
}

/** The outcome of a group: how to answer the works that are done, and which ones have to run in another group. */
export interface GroupOutcome {
  readonly answers: readonly (() => void)[];
  readonly again: readonly WaitingWrite[];
  /** Whether the next group needs a savepoint for each work. */
  readonly apart?: boolean;
}

/** Nothing of the group was stored: which works are told so, and which run again. */
export function afterFailure(thrown: unknown, group: readonly WaitingWrite[], ran: number): GroupOutcome {
  if (thrown instanceof WorkFailed) return { answers: [], again: group, apart: true };
  if (thrown instanceof GroupLost) {
    const { work: lost, cause } = thrown;
    return {
      answers: [() => lost.reject(sqliteFailure(cause))],
      again: group.filter((work) => work !== lost),
      apart: true,
    };
  }
  const fault = sqliteCommitFailure(thrown);
  return {
    answers: group.slice(0, ran).map((work) => () => work.reject(fault)),
    again: group.slice(ran),
  };
}
