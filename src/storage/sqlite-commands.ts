// Commands on one SQLite connection: their statements are prepared once, and run at once.
import type { Database } from "bun:sqlite";
import type { Command, CommandEffects, SqliteStatement, SqlValue } from "./commands.ts";

export type CommandOn = <Input, Output>(
  command: Command<Input, Output>,
) => (input: Input, effects: CommandEffects) => Output;

/** Commands, their statements prepared once on this connection. */
export function commandsOn(writer: Database): CommandOn {
  const known = new Map<unknown, (input: never, effects: CommandEffects) => unknown>();
  function prepare(text: string): SqliteStatement {
    const statement = writer.prepare<Record<string, unknown>, SqlValue[]>(text);
    return {
      run: (...values) => statement.run(...values).changes,
      get: (...values) => statement.get(...values),
    };
  }
  return (command) => {
    const run = known.get(command) ?? command.sqlite(prepare);
    known.set(command, run);
    return run as ReturnType<typeof command.sqlite>;
  };
}
