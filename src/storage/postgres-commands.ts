// Commands on one Postgres connection: those of one kind are one statement.
import type { CommandGroup } from "./command-batches.ts";
import type { SharedCount, SqlRow } from "./commands.ts";
import type { DatabaseConnection } from "./pool.ts";
import type { Tx } from "./store.ts";

/** What the statements of one transaction have together. */
export interface Effects {
  readonly ended: Tx["ended"];
  /** Of the totals. */
  readonly shard: number;
}

/** Runs commands of one kind as one statement. */
export async function runCommands<Input, Output>(
  connection: DatabaseConnection,
  { postgres }: SharedCount<Input, Output>,
  inputs: readonly Input[],
  { ended, shard }: Effects,
): Promise<Output[]> {
  const rows = (await connection.query(postgres.text, postgres.valuesOf(inputs, shard), "objects")) as SqlRow[];
  const followed: SqlRow[] = [];
  for (const { text, values } of postgres.afterwards?.(inputs, rows) ?? []) {
    followed.push(...((await connection.query(text, [...values], "objects")) as SqlRow[]));
  }
  return postgres.outputsOf(inputs, rows, { ended }, followed);
}

/** One kind after the other, each with `run`. Gives the outputs of each. */
export async function runGroups(
  groups: readonly CommandGroup[],
  run: (group: CommandGroup) => Promise<unknown[]>,
): Promise<unknown[][]> {
  const outputs: unknown[][] = [];
  for (const group of groups) outputs.push(await run(group));
  return outputs;
}
