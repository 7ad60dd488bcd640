// What keeps the demo from going on. The message is all that is shown of it.

export class DemoProblem extends Error {
  override readonly name = "DemoProblem";
}
