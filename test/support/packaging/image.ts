// The Dockerfile as data: its stages as a parser reads them, and of the last one what a container of it starts with.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import {
  DockerfileParser,
  type From,
  type Instruction,
  type JSONInstruction,
  type Label,
  type PropertyInstruction,
} from "dockerfile-ast";

const ROOT = join(import.meta.dir, "../../..");

export interface Image {
  readonly froms: readonly string[];
  readonly instructions: readonly Instruction[];
  /** Commands of all stages. */
  readonly runs: readonly string[];
  readonly env: Readonly<Record<string, string>>;
  readonly labels: Readonly<Record<string, string>>;
  readonly user: string;
  readonly workdir: string;
  readonly volumes: readonly string[];
  readonly ports: readonly string[];
  readonly stopSignal: string;
  readonly entrypoint: readonly string[];
  readonly command: readonly string[];
  readonly healthCheck: readonly string[];
}

export function readImage(): Image {
  const file = DockerfileParser.parse(readFileSync(join(ROOT, "Dockerfile"), "utf8"));
  const instructions = file.getInstructions();
  const last = instructions.findLastIndex((each) => each.getKeyword() === "FROM");
  const inLast = instructions.slice(last);
  const of = <T extends Instruction>(keyword: string, among: readonly Instruction[] = inLast) =>
    among.filter((each) => each.getKeyword() === keyword) as T[];
  const properties = (keyword: string) =>
    Object.fromEntries(
      of<PropertyInstruction>(keyword).flatMap((each) =>
        each.getProperties().map((property) => [property.getName(), property.getValue() ?? ""]),
      ),
    );
  const words = (keyword: string) =>
    of<Label>(keyword).flatMap((each) => each.getArguments().map((argument) => argument.getValue()));
  const json = (keyword: string) =>
    of<JSONInstruction>(keyword).flatMap((each) => each.getJSONStrings().map((text) => JSON.parse(text.getValue())));
  const [check] = inLast.filter((each) => each.getKeyword() === "HEALTHCHECK");
  return {
    froms: of<From>("FROM", instructions).map((each) => each.getImage() ?? ""),
    instructions,
    runs: of("RUN", instructions).map((each) => each.getArgumentsContent() ?? ""),
    env: properties("ENV"),
    labels: properties("LABEL"),
    user: words("USER").join(),
    workdir: words("WORKDIR").join(),
    volumes: words("VOLUME"),
    ports: words("EXPOSE"),
    stopSignal: words("STOPSIGNAL").join(),
    entrypoint: json("ENTRYPOINT"),
    command: json("CMD"),
    healthCheck: JSON.parse(/\[.*\]$/.exec(check?.getArgumentsContent() ?? "")?.[0] ?? "[]"),
  };
}
